"""Operations made of collectives: agreement before data, choice of algorithm, memory to use."""
