"""Where telemetry rests: an embedded receiver and Parquet store, and readers of Jaeger.

Whatever the backend, what comes out is ``tables.RunTables``.
"""
