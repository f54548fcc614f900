# The module that DJL Serving imports: `option.entryPoint=handler.entry`. DJL calls the attribute of this module that
# the property `handler` names, and a client's header can set that property if the front end does not check it. So this
# module has only the functions that DJL may call, and every import is inside a function, or its name is deleted.

try:
    import handler.djl.worker

    del handler  # The module stays imported, so that DJL's first call can be answered in a millisecond.
except ImportError:  # `handle` reports it
    pass


def handle(inputs):  # type: ignore[no-untyped-def]
    """Load the model on the first call, and process a request on each later call.

    Returns:
        An Output. In async mode, this is an awaitable of an Output or of an asynchronous iterator of Outputs.
    """
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
