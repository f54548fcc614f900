"""`lmi move`: adopt an endpoint, start its options here, replay requests and test the contract of its container."""
