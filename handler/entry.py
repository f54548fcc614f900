# What DJL Serving imports: `option.entryPoint=handler.entry`. The property `handler`, which a client's header can set
# where the front end does not watch it, picks the attribute of this module that is called. So nothing is here but the
# functions that DJL is meant to call; everything is imported inside them.


def handle(inputs):  # type: ignore[no-untyped-def]
    """The first call loads the model, later ones are requests. Returns an Output; in async mode, something to await."""
    try:
        from handler.djl import worker
    except ImportError as error:
        from djl_python import Output

        return Output(code=500, message=f"the handler cannot start: {error}")
    return worker.load(inputs) if worker.mode is None else worker.mode.answer(inputs)


def register_adapter(inputs):  # type: ignore[no-untyped-def]
    from handler.djl import worker

    return worker.adapters(inputs, "register")


def unregister_adapter(inputs):  # type: ignore[no-untyped-def]
    from handler.djl import worker

    return worker.adapters(inputs, "unregister")


def update_adapter(inputs):  # type: ignore[no-untyped-def]
    from handler.djl import worker

    return worker.adapters(inputs, "update")
