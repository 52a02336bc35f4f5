"""Anthropic's Messages interface, as translations to chats."""
