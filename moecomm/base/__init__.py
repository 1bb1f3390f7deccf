"""What every room needs: checks, arrays of other libraries, constants of the protocol, documents, processes."""
