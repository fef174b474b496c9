"""What gateway, store server and fine-tuning server share: HTTP, who may ask for what, and in which turn."""
