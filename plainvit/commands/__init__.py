"""Every command, by family: functions whose parameters are the flags, and which import their packages inside."""
