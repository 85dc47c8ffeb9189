"""`python -m das_adapter.bench`, which is `das-adapter bench`."""

from das_adapter.bench.run import main

main()
