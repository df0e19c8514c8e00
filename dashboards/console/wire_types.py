#!/usr/bin/env python3
"""Writes src/wire.ts, the types of the page's calls, from proto/: wire_types.py [file].

Needs protoc and the Python package protobuf (deploy/requirements-test.txt). The file is
committed, so that the page is built without this script; a test compares the two.

The types are those of what server/query/json_text.cc writes: the names of the .proto,
and every field except a message that is absent. Other generators have other names, and
every field optional.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

PROTO = Path(__file__).resolve().parents[2] / "proto"
SERVICE = "Query"
WIDTH = 110

# Message fields that the server sets in every answer.
ALWAYS_SET = frozenset({"Alert.last", "Run.description", "RunDescription.layout", "Series.id"})

SCALARS = {
    FieldDescriptorProto.TYPE_BOOL: "boolean",
    FieldDescriptorProto.TYPE_BYTES: "string",
    FieldDescriptorProto.TYPE_DOUBLE: "Real",
    FieldDescriptorProto.TYPE_FLOAT: "Real",
    FieldDescriptorProto.TYPE_INT32: "number",
    FieldDescriptorProto.TYPE_INT64: "string",
    FieldDescriptorProto.TYPE_SINT32: "number",
    FieldDescriptorProto.TYPE_SINT64: "string",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_UINT32: "number",
    FieldDescriptorProto.TYPE_UINT64: "string",
}

HEAD = """\
// Made from proto/ by wire_types.py: do not edit. The meaning of each field is in its .proto.
//
// Messages as JSON. 64-bit integers are strings, bytes are base64, enums are their names.

/** JSON knows finite numbers only. */
export type Real = number | 'NaN' | 'Infinity' | '-Infinity';
"""


def descriptors(folder: Path) -> FileDescriptorSet:
    """The files of bellwether/v1 below `folder`."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "all.pb"
        files = sorted(folder.glob("bellwether/v1/*.proto"))
        subprocess.run(["protoc", f"-I{folder}", "--include_imports", f"--descriptor_set_out={out}", *map(str, files)], check=True)
        return FileDescriptorSet.FromString(out.read_bytes())


def short(name: str) -> str:
    """.bellwether.v1.Judged.Family -> JudgedFamily."""
    return "".join(name.split(".")[3:])


class Types:
    """Messages and enums by their full name, in the order of the files; and the service's calls."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.types: dict[str, DescriptorProto | EnumDescriptorProto] = {}
        self.methods: list[MethodDescriptorProto] = []
        for file in files.file:
            for declared in (*file.message_type, *file.enum_type):
                self._learn(f".{file.package}", declared)
            for service in file.service:
                if service.name == SERVICE:
                    self.methods += [m for m in service.method if not m.client_streaming and not m.server_streaming]

    def _learn(self, scope: str, declared: DescriptorProto | EnumDescriptorProto) -> None:
        name = f"{scope}.{declared.name}"
        self.types[name] = declared
        if isinstance(declared, DescriptorProto):
            for nested in (*declared.nested_type, *declared.enum_type):
                self._learn(name, nested)

    def needed(self) -> set[str]:
        """What the calls ask and answer, and everything in it."""
        found: set[str] = set()
        ahead = [name for method in self.methods for name in (method.input_type, method.output_type)]
        while ahead:
            name = ahead.pop()
            declared = self.types[name]
            if name not in found and isinstance(declared, DescriptorProto):
                ahead += [field.type_name for field in declared.field if field.type_name]
            found.add(name)
        return found

    def field(self, owner: str, field: FieldDescriptorProto) -> str:
        """One line of an interface."""
        kind = SCALARS.get(field.type) or short(field.type_name)
        message = self.types.get(field.type_name)
        # Known to be absent or not: a message, what is `optional`, one of several.
        mark = "?" if isinstance(message, DescriptorProto) or field.HasField("oneof_index") else ""
        if f"{short(owner)}.{field.name}" in ALWAYS_SET:
            mark = ""
        elif isinstance(message, DescriptorProto) and message.options.map_entry:
            value = message.field[1]
            kind, mark = f"Record<string, {SCALARS.get(value.type) or short(value.type_name)}>", ""
        elif field.label == FieldDescriptorProto.LABEL_REPEATED:
            kind, mark = f"{kind}[]", ""
        return f"  {field.name}{mark}: {kind};\n"

    def declaration(self, name: str) -> str:
        """A message as an interface, an enum as the union of its names."""
        declared = self.types[name]
        if isinstance(declared, DescriptorProto):
            return f"export interface {short(name)} {{\n{''.join(self.field(name, f) for f in declared.field)}}}\n"
        names = textwrap.wrap(" | ".join(f"'{value.name}'" for value in declared.value), WIDTH)
        return f"export type {short(name)} =\n" + "\n".join(f"  {line}" for line in names) + ";\n"

    def declarations(self) -> Iterator[str]:
        """All of the file behind its head."""
        needed = self.needed()
        for name, declared in self.types.items():
            if name in needed and not (isinstance(declared, DescriptorProto) and declared.options.map_entry):
                yield self.declaration(name)
        rows = "".join(f"  {m.name}: {{ request: {short(m.input_type)}; response: {short(m.output_type)} }};\n" for m in self.methods)
        yield f"/** The calls that have one answer. */\nexport interface {SERVICE} {{\n{rows}}}\n"


def wire_types(proto: Path = PROTO) -> str:
    """The text of wire.ts."""
    types = Types(descriptors(proto))
    fields = {f"{short(name)}.{f.name}" for name, m in types.types.items() if isinstance(m, DescriptorProto) for f in m.field}
    if gone := sorted(ALWAYS_SET - fields):
        raise SystemExit(f"ALWAYS_SET names fields that are not in {proto}: {', '.join(gone)}")
    return "\n".join([HEAD, *types.declarations()])


def main() -> None:
    """Writes the types."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "src/wire.ts"
    out.write_text(wire_types(), encoding="utf-8")


if __name__ == "__main__":
    main()
