"""Many runs -> a verdict on one published claim, or the score of one published protocol."""
