"""What of AWS the client needs: credentials, the runtime API and its errors."""
