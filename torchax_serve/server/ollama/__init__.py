"""The interface of Ollama, translated to chats, completions and embeddings."""
