"""An agent built on the spot: its own tokenizer, a tiny model, and a warm start on scripted demonstrations."""
