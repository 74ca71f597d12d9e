"""The package that SGLang's model registry imports: one module, one class."""
