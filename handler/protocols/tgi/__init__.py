"""The dialects of TGI and MindIE."""
