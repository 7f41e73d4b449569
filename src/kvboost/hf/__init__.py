"""The model side: everything that touches Hugging Face Transformers."""
