"""Write a specification for an endpoint that another tool created. It changes nothing in AWS."""
