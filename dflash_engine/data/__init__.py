"""Training data: chats, templates, supervision, batches."""
