"""OpenAI's Responses interface, as translations to chats."""
