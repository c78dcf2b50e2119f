"""The trace file: schema, writer, reader and stored dtypes. Needs numpy and h5py only."""
