"""Write a specification for an endpoint that something else created. Nothing in AWS is changed."""
