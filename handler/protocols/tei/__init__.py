"""The dialect of Hugging Face's text-embeddings-inference (TEI)."""
