"""Send recorded requests to two servers, and compare their answers. Nothing that serves imports this package."""
