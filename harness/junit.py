"""JUnit XML of a check, in the form that CI systems read: one suite per variant and op, one test case per case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from pagedtune.harness.checking import Listing, Outcome
from pagedtune.kernels.record import Status

_TAGS = {
    Status.WRONG: "failure",
    Status.CORRUPTED: "failure",
    Status.CRASHED: "error",
    Status.TIMEOUT: "error",
    Status.BUILD_FAILED: "error",
    Status.NOT_RUN: "error",  # skipped where missing cases are accepted
    Status.REJECTED: "skipped",
}
# Characters that XML 1.0 cannot hold in any form; foreign messages may contain them.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(outcomes: Sequence[Outcome], listings: Sequence[Listing], allow_missing: bool) -> bytes:
    """The report: `failure` for a wrong answer, `error` for a crash, time-out or missing run, `skipped` for a case
    that the variant rejects (and for a missing run where `allow_missing`). A variant that does not load is an error.
    """
    root = ElementTree.Element("testsuites", name="pagedtune check")
    suites: dict[str, ElementTree.Element] = {}
    for outcome in outcomes:
        name = f"{outcome.planned.variant}.{outcome.planned.op.value}"
        if name not in suites:
            suites[name] = ElementTree.SubElement(root, "testsuite", name=_clean(name))
        _add_case(suites[name], name, outcome, allow_missing)
    for listing in listings:
        if not listing.broken:
            continue
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(listing.ref))
        case = ElementTree.SubElement(suite, "testcase", name="load", time="0", classname=_clean(listing.ref))
        _add_result(case, "error", "load", listing.broken)
    for element in (*root, root):
        _count(element)
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n".encode()


def _add_case(suite: ElementTree.Element, name: str, outcome: Outcome, allow_missing: bool) -> None:
    key = outcome.planned.case.key
    case = ElementTree.SubElement(
        suite, "testcase", name=_clean(key), classname=_clean(name), time=f"{outcome.duration_s:.3f}"
    )
    if outcome.status is Status.NOT_RUN and allow_missing:
        _add_result(case, "skipped", outcome.status.value, outcome.reason)
    elif outcome.status in _TAGS:
        _add_result(case, _TAGS[outcome.status], outcome.status.value, outcome.reason)


def _add_result(case: ElementTree.Element, tag: str, kind: str, reason: str) -> None:
    ElementTree.SubElement(case, tag, message=_clean(reason), type=kind).text = _clean(reason)


def _count(element: ElementTree.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
