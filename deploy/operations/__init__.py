"""Operations on an existing endpoint: status, logs, scaling and measurements."""
