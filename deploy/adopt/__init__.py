"""Write a specification for an endpoint that another tool created. Nothing in AWS is changed."""
