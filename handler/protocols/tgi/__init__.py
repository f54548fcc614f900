"""TGI's and MindIE's dialects."""
