"""Streams, captures, graphs and events of the stand-in driver."""

from __future__ import annotations

from typing import Any

from pagedtune.harness.standin_state import Refused, StandInState, Stream, api


class StandInStreams(StandInState):
    """The calls, named and used as in `cuda.bindings.driver`."""

    @api(1)
    def cuStreamCreate(self, flags: int) -> Any:
        stream = self.new_handle("CUstream")
        self.here.streams[int(stream)] = Stream(self.current, not flags)
        return stream

    @api()
    def cuStreamDestroy(self, stream: Any) -> None:
        self.find("streams", stream)
        del self.here.streams[int(stream)]

    @api()
    def cuStreamSynchronize(self, stream: Any) -> None:
        self.refuse_in_capture([self.stream_of(stream)])

    @api(in_capture=False)
    def cuCtxSynchronize(self) -> None:
        """Everything is done already."""

    @api()
    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> None:
        if not int(stream):
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        found = self.find("streams", stream)
        if found.nodes is not None:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE")
        found.nodes = []

    @api(1)
    def cuStreamEndCapture(self, stream: Any) -> Any:
        found = self.find("streams", stream)
        if found.nodes is None:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE")
        nodes, broken = found.nodes, found.broken
        found.nodes, found.broken = None, False
        if broken:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        graph = self.new_handle("CUgraph")
        self.here.graphs[int(graph)] = nodes
        return graph

    @api(1)
    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        executable = self.new_handle("CUgraphExec")
        self.here.executables[int(executable)] = list(self.find("graphs", graph))
        return executable

    @api()
    def cuGraphDestroy(self, graph: Any) -> None:
        self.find("graphs", graph)
        del self.here.graphs[int(graph)]

    @api()
    def cuGraphExecDestroy(self, executable: Any) -> None:
        self.find("executables", executable)
        del self.here.executables[int(executable)]

    @api()
    def cuGraphLaunch(self, executable: Any, stream: Any) -> None:
        nodes = self.find("executables", executable)
        for node in nodes:
            self.submit(self.stream_of(stream), node)

    @api(1)
    def cuEventCreate(self, flags: int) -> Any:
        event = self.new_handle("CUevent")
        self.here.events[int(event)] = False
        return event

    @api()
    def cuEventDestroy(self, event: Any) -> None:
        self.find("events", event)
        del self.here.events[int(event)]

    @api()
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self._find_event(event)
        self.submit(self.stream_of(stream), lambda: self._mark(int(event)))

    @api(in_capture=False)
    def cuEventSynchronize(self, event: Any) -> None:
        self._find_event(event)

    @api(1)
    def cuEventElapsedTime(self, start: Any, end: Any) -> float:
        if not (self._find_event(start) and self._find_event(end)):
            raise Refused("CUDA_ERROR_INVALID_HANDLE")
        raise Refused("CUDA_ERROR_NOT_SUPPORTED")

    def _mark(self, event: int) -> None:
        self.here.events[event] = True

    def _find_event(self, event: Any) -> bool:
        if int(event) not in self.here.events:
            raise Refused("CUDA_ERROR_INVALID_HANDLE")
        return self.here.events[int(event)]
