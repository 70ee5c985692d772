"""``python -m argus_otel.cli``, where the ``argus`` script is not on the path."""

from argus_otel.cli.main import main

main()
