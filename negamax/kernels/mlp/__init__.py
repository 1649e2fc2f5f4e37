"""Operations of an MLP between its GEMMs."""
