"""N-gram pool files for a tokenizer: make, open and describe them."""
