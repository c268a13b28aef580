"""Pool files (`lookahead.ngram.pool_file`) and the tokenizers they belong to: making, opening and describing them."""
