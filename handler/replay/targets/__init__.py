"""What answers the requests: a server by URL, one that is started for it, a SageMaker endpoint, or the recording."""
