"""Other libraries' models through the same eyes: timm:NAME is evaluated by the same code on the same pixels."""
