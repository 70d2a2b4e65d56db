#!/usr/bin/env python3
"""Compares this library with the headers of CUDA releases, and with drivers.

    preload/coverage/compare-headers.py [--since] DIR… LIBCUDA…

Each DIR has the headers of one release: cuda.h and, where they are there, cudaGL.h, cudaEGL.h, cudaVDPAU.h and cudaProfiler.h,
in DIR itself or in DIR/include. Run it by hand when a CUDA release comes; README.md says where headers are. It downloads
nothing, needs gcc, and compares

- the functions that a release declares, in all their versions and flavours, with entry-points.tsv;
- the parameters of every hook, and of every driver function that the library calls, with every release's declaration;
- the constants and the structures that the library defines with those of every release.

Each LIBCUDA is the file of a driver, libcuda.so.N. No GPU is needed. It compares

- what the driver exports with entry-points.tsv;
- what cuGetProcAddress finds, for every name in every version and flavour, with what the driver exports: hooks are found by
  the address of an export (src/lookup/table.rs).

It exits with 1 if anything differs. What a release does not have yet is no difference. With --since it also prints in which
of the given releases each hooked or called function, and each constant, is there first.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
HEADERS = ["cuda.h", "cudaProfiler.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h"]

# What cudaGL.h, cudaEGL.h and cudaVDPAU.h need of other packages, which are seldom installed. Only sizes matter.
FOREIGN = """
typedef unsigned int GLuint, GLenum, GLint, EGLint, VdpDevice, VdpVideoSurface, VdpOutputSurface, VdpStatus, VdpFuncId;
typedef void *EGLStreamKHR, *EGLImageKHR, *EGLSyncKHR, *EGLDisplay;
typedef int VdpGetProcAddress();
"""

# ---- the library ----

# Constants whose C names do not follow from their names here, and those outside of types.rs: (file, name) -> C expression.
CONSTANTS = {
    ("driver/types.rs", "CTX_DEFAULT_STREAM"): None,  # NULL
    ("driver/types.rs", "POOL_USAGE_HW_DECOMPRESS"): "CU_MEM_POOL_CREATE_USAGE_HW_DECOMPRESS",
    ("gpu/support.rs", "DEVICE_ATTRIBUTE_INTEGRATED"): "CU_DEVICE_ATTRIBUTE_INTEGRATED",
    ("gpu/support.rs", "DEVICE_ATTRIBUTE_COMPUTE_MODE"): "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE",
    ("gpu/support.rs", "DEVICE_ATTRIBUTE_MPS_ENABLED"): "CU_DEVICE_ATTRIBUTE_MPS_ENABLED",
    ("gpu/support.rs", "COMPUTE_MODE_PROHIBITED"): "CU_COMPUTEMODE_PROHIBITED",
    ("gpu/support.rs", "COMPUTE_MODE_EXCLUSIVE_PROCESS"): "CU_COMPUTEMODE_EXCLUSIVE_PROCESS",
    ("hooks/launch.rs", "GRAPH_INSTANTIATE_UPLOAD"): "CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD",
    ("hooks/ipc.rs", "LAZY_ENABLE_PEER_ACCESS"): "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    ("hooks/arrays.rs", "ARRAY3D_UNBACKED"): "CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING",
    ("copies/shapes.rs", "MEMORYTYPE_DEVICE"): "CU_MEMORYTYPE_DEVICE",
    ("copies/shapes.rs", "MEMORYTYPE_ARRAY"): "CU_MEMORYTYPE_ARRAY",
    ("copies/shapes.rs", "MEMORYTYPE_UNIFIED"): "CU_MEMORYTYPE_UNIFIED",
    ("copies/shapes.rs", "POINTER"): "CU_MEMCPY_OPERAND_TYPE_POINTER",
    ("copies/shapes.rs", "ARRAY"): "CU_MEMCPY_OPERAND_TYPE_ARRAY",
    ("copies/shapes.rs", "COPY"): "CU_GRAPH_NODE_TYPE_MEMCPY",
    ("copies/shapes.rs", "FILL"): "CU_GRAPH_NODE_TYPE_MEMSET",
    ("memory/staging.rs", "REGISTER_FLAGS"): "CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP",
}

# Structures: (file, name) -> the C types that it stands for, whether it is only their beginning, and pairs of fields.
# A field of here may be an element of an array or a field of a field.
SIDE = {"at[0]": "{}XInBytes", "at[1]": "{}Y", "kind": "{}MemoryType", "host": "{}Host", "device": "{}Device",
        "array": "{}Array", "pitch": "{}Pitch"}
LAYER = {"at[2]": "{}Z", "at[3]": "{}LOD", "height": "{}Height"}


def sides(fields):
    return {f"{side}.{ours}": theirs.format(prefix)
            for side, prefix in [("from", "src"), ("to", "dst")] for ours, theirs in fields.items()}


EXTENT = {"extent[0]": "WidthInBytes", "extent[1]": "Height"}
TEXELS = {"width": "Width", "height": "Height", "format": "Format", "channels": "NumChannels"}
STRUCTURES = {
    ("driver/types.rs", "Location"): [("CUmemLocation", False, {"kind": "type", "id": "id"})],
    ("driver/types.rs", "AccessDesc"): [("CUmemAccessDesc", False, {"location": "location", "flags": "flags"})],
    ("driver/types.rs", "AllocationProp"): [("CUmemAllocationProp", False, {
        "kind": "type", "requested_handle_types": "requestedHandleTypes", "location": "location",
        "win32_handle_meta_data": "win32HandleMetaData", "compression_type": "allocFlags.compressionType",
        "gpu_direct_rdma_capable": "allocFlags.gpuDirectRDMACapable", "usage": "allocFlags.usage",
        "reserved": "allocFlags.reserved"})],
    ("copies/shapes.rs", "Copy2D"): [("CUDA_MEMCPY2D", False, sides(SIDE) | EXTENT)],
    ("copies/shapes.rs", "Copy3D"): [
        ("CUDA_MEMCPY3D", False, sides(SIDE | LAYER) | EXTENT | {"extent[2]": "Depth"}),
        ("CUDA_MEMCPY3D_PEER", False,
         sides(SIDE | LAYER | {"context": "{}Context"}) | EXTENT | {"extent[2]": "Depth"}),
    ],
    ("copies/shapes.rs", "Operand"): [("CUmemcpy3DOperand", False, {"kind": "type", "name": "op.ptr.ptr"}),
                                     ("CUmemcpy3DOperand", False, {"name": "op.array.array"})],
    ("copies/shapes.rs", "BatchCopy3D"): [("CUDA_MEMCPY3D_BATCH_OP", False, {
        "from": "src", "to": "dst", "extent": "extent", "order": "srcAccessOrder", "flags": "flags"})],
    ("copies/shapes.rs", "Fill"): [(version, True, {"to": "dst"})
                                  for version in ["CUDA_MEMSET_NODE_PARAMS", "CUDA_MEMSET_NODE_PARAMS_v2"]],
    ("copies/shapes.rs", "NodeParams"): [("CUgraphNodeParams", True, {"kind": "type", "reserved": "reserved0"})],
    ("copies/shapes.rs", "CopyNode"): [("CUDA_MEMCPY_NODE_PARAMS", False, {
        "flags[0]": "flags", "context": "copyCtx", "copy": "copyParams"})],
    ("hooks/launch.rs", "LaunchConfig"): [("CUlaunchConfig", True, {
        "grid": "gridDimX", "block": "blockDimX", "shared": "sharedMemBytes", "stream": "hStream"})],
    ("hooks/launch.rs", "LaunchParams"): [("CUDA_LAUNCH_PARAMS", False, {
        "function": "function", "grid": "gridDimX", "block": "blockDimX", "shared": "sharedMemBytes",
        "stream": "hStream", "arguments": "kernelParams"})],
    ("hooks/launch.rs", "InstantiateParams"): [("CUDA_GRAPH_INSTANTIATE_PARAMS", True, {
        "flags": "flags", "upload_stream": "hUploadStream"})],
    ("hooks/vmm.rs", "ArrayMap"): [("CUarrayMapInfo", False, {
        "operation": "memOperationType", "handle_kind": "memHandleType", "memory": "memHandle.memHandle",
        "offset": "offset", "devices": "deviceBitMask", "flags": "flags", "reserved": "reserved"})],
    ("hooks/arrays.rs", "Array"): [("CUDA_ARRAY_DESCRIPTOR", False, TEXELS)],
    ("hooks/arrays.rs", "Array3D"): [("CUDA_ARRAY3D_DESCRIPTOR", False, TEXELS | {"depth": "Depth", "flags": "Flags"})],
    ("registry/pools.rs", "Properties"): [("CUmemPoolProps", False, {
        "kind": "allocType", "handle_types": "handleTypes", "location": "location",
        "win32_security_attributes": "win32SecurityAttributes"})],
    ("hooks/ipc.rs", "MemHandle"): [("CUipcMemHandle", False, {})],
}

PRIMITIVES = {"u8": 1, "i8": 1, "c_char": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "c_int": 4, "u64": 8, "i64": 8,
              "usize": 8}


def sources():
    """All sources except the hooks of other libraries, by their names in src/."""
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.rs"))}
    return {name: text for name, text in files.items() if not name.startswith("hooks/nvml/")}


def split(text):
    """The parts between commas that are in no bracket."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [part.strip() for part in [*parts, text[begin:]] if part.strip()]


def closing(text, at):
    """Where the bracket that opens here is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"not closed: {text[at:at + 60]!r}")


def is_pointer(type):
    """Whether a Rust type is passed as a pointer: `*mut T`, `&T`, `Option<&mut T>`, `Option<fn()>`."""
    return re.match(r"[*&]|Option<(&|unsafe |extern |fn\b)", type) is not None


class Library:
    """What the sources declare."""

    def __init__(self):
        self.files = sources()
        self.aliases = {name: type for text in self.files.values()
                        for name, type in re.findall(r"^(?:pub )?type (\w+) = ([^;]+);", text, re.M)}
        # The length of a handle of ours is that of the driver's.
        self.aliases["IpcHandle"] = "[u8; 64]"
        self.structures, self.unions = {}, set()
        for file, text in self.files.items():
            for match in re.finditer(r"#\[repr\(C\)\]\n(?:pub(?:\(\w+\))? )?(struct|union) (\w+) ?([({])", text):
                at = match.end() - 1
                body = re.sub(r"//.*", "", text[at + 1:closing(text, at)])
                fields = [re.sub(r"^pub(?:\(\w+\))? ", "", field) for field in split(body)]
                if match[3] == "(":
                    fields = [f"{i}: {field}" for i, field in enumerate(fields)]
                self.structures[file, match[2]] = [tuple(field.split(": ", 1)) for field in fields]
                if match[1] == "union":
                    self.unions.add((file, match[2]))

    def layout(self, file, type):
        """Size and alignment of a type that a file names."""
        type = type.strip()
        if is_pointer(type):
            return 8, 8
        if type.startswith("["):
            element, count = type[1:-1].rsplit(";", 1)
            size, alignment = self.layout(file, element)
            return size * int(count), alignment
        if type.startswith("UnsafeCell<"):
            return self.layout(file, type[len("UnsafeCell<"):-1])
        if type in PRIMITIVES:
            return PRIMITIVES[type], PRIMITIVES[type]
        if type in self.aliases:
            return self.layout(file, self.aliases[type])
        return self.of_structure(*self.find(file, type))

    def find(self, file, name):
        """The structure of this name that a file means: its own, or one of types.rs, or the only one."""
        known = [key for key in self.structures if key[1] == name]
        for wanted in [file, "driver/types.rs"]:
            if (wanted, name) in known:
                return wanted, name
        if len(known) != 1:
            raise KeyError(f"{file}: {name}")
        return known[0]

    def offsets(self, file, name):
        end, most, offsets = 0, 1, {}
        for field, type in self.structures[file, name]:
            size, alignment = self.layout(file, type)
            at = 0 if (file, name) in self.unions else -(-end // alignment) * alignment
            offsets[field] = at, type
            end, most = max(end, at + size), max(most, alignment)
        return offsets, -(-end // most) * most, most

    def of_structure(self, file, name):
        return self.offsets(file, name)[1:]

    def offset(self, file, name, path):
        """The offset of a field such as `from.at[1]`."""
        at = 0
        for part in path.split("."):
            field, index = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", part).groups()
            inner, type = self.offsets(file, name)[0][field]
            at += inner
            if index is not None:
                type = type.strip()[1:-1].rsplit(";", 1)[0]
                at += int(index) * self.layout(file, type)[0]
            if part != path.split(".")[-1]:
                file, name = self.find(file, type.strip())
        return at

    def kind(self, file, type):
        """How a parameter is passed: a pointer, an integer of some size, or a structure of some size."""
        type = type.strip()
        if is_pointer(type):
            return "p"
        if type in PRIMITIVES:
            return f"i{PRIMITIVES[type]}"
        if type in self.aliases:
            return self.kind(file, self.aliases[type])
        return f"s{self.layout(file, type)[0]}"

    def parameters(self, file, text):
        return [self.kind(file, parameter.split(":", 1)[1]) for parameter in split(re.sub(r"//.*", "", text))]

    def functions(self):
        """(name, where, kinds of parameters) of every hook, and of every function that is called."""
        for file, text in self.files.items():
            begin = text.find("\nhooks! {")
            if file.startswith("hooks/") and begin >= 0:
                for match in re.finditer(r"\n    \[([\w |]+)\] \(", text[begin:]):
                    at = begin + match.end() - 1
                    kinds = self.parameters(file, text[at + 1:closing(text, at)])
                    for name in match[1].split("|"):
                        yield name.strip(), file, kinds
        file = "driver/mod.rs"
        text = self.files[file]
        text = text[text.index("\nfunctions! {"):]
        for match in re.finditer(r"\n    (cu\w+)\(", text):
            at = match.end() - 1
            yield match[1], file, self.parameters(file, text[at + 1:closing(text, at)])

    def constants(self):
        """(where, C expression, value) of every constant of the driver's."""
        known = dict(CONSTANTS)
        text = self.files["driver/types.rs"]
        for match in re.finditer(r"^( *)pub const (\w+):", text, re.M):
            name = match[2]
            prefix = "CUDA_" if re.match(r"SUCCESS|ERROR_", name) else "CU_POINTER_ATTRIBUTE_" if match[1] else "CU_"
            known.setdefault(("driver/types.rs", name), prefix + name)
        for (file, name), expression in known.items():
            match = re.search(rf"const {name}: [^=]+= ([^;]+);", self.files[file])
            if match is None:
                raise KeyError(f"{file}: {name}")
            if expression is not None:
                value = re.sub(r".*without_provenance_mut\((\d+)\)", r"\1", match[1]).replace("_", "")
                yield f"{file}: {name}", expression, eval(value, {"__builtins__": {}})


# ---- a release ----


class Release:
    """What the headers of one release declare."""

    def __init__(self, folder):
        folder = folder / "include" if (folder / "include" / "cuda.h").exists() else folder
        self.folder = folder
        self.headers = [header for header in HEADERS if (folder / header).exists()]
        if "cuda.h" not in self.headers:
            raise FileNotFoundError(folder / "cuda.h")
        version = int(re.search(r"#define CUDA_VERSION (\d+)", (folder / "cuda.h").read_text(errors="replace"))[1])
        self.name = f"{version // 1000}.{version % 1000 // 10}"
        self.text = self.gcc("-E", "-P", source=self.prelude())
        self.macros = self.gcc("-E", "-dM", source=self.prelude())
        self.declared = self.declarations()

    def prelude(self):
        """Includes the headers so that they declare all versions and flavours of a function by their exported names."""
        includes = "".join(f'#include "{header}"\n' for header in self.headers)
        return "#define __CUDA_API_VERSION_INTERNAL\n#include <stdio.h>\n#include <stddef.h>\n" + FOREIGN + includes

    def gcc(self, *flags, source):
        with tempfile.TemporaryDirectory() as folder:
            # Empty headers of other packages, for which FOREIGN stands.
            for name in ["GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h"]:
                place = Path(folder, name)
                place.parent.mkdir(exist_ok=True)
                place.touch()
            file = Path(folder, "a.c")
            file.write_text(source)
            command = ["gcc", "-w", "-I", folder, "-I", str(self.folder), *flags, str(file)]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def run(self, source):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "a")
            self.gcc("-o", str(program), source=source)
            return subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()

    def declarations(self):
        """The kinds of parameters of every function, by its exported name."""
        text = re.sub(r"__attribute__\s*\(\(.*?\)\)", " ", self.text)
        found = dict(re.findall(r"\bCUresult\s+(?:\w+\s+)?(cu[A-Z]\w*)\s*\(([^;{}]*?)\)\s*;", text))
        # The type of a parameter: without its name; an array is a pointer.
        lines = []
        for name, parameters in found.items():
            types = []
            for parameter in split(parameters):
                if parameter == "void":
                    continue
                parameter, arrays = re.subn(r"\[[^]]*\]", "", parameter)
                type = re.sub(r"\b(?!(?:int|char|float|double|long|short|unsigned|void|size_t)\b)\w+\s*$", "", parameter)
                type = parameter if not type.strip() or re.fullmatch(r"\s*(const|struct|enum)\s*", type) else type
                types.append(type + "*" * arrays)
            prints = "".join(f' printf(" %d:%zu", __builtin_classify_type(*({type} *)0), sizeof({type}));' for type in types)
            lines.append(f'printf("{name}");{prints} printf("\\n");')
        source = self.prelude() + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
        declared = {}
        for line in self.run(source):
            name, *parameters = line.split()
            declared[name] = [self.kind(*map(int, parameter.split(":"))) for parameter in parameters]
        return declared

    @staticmethod
    def kind(kind, size):
        match kind:
            case 5:  # pointer
                return "p"
            case 1 | 2 | 3 | 4:  # integer, character, enumeration, boolean
                return f"i{size}"
            case 12 | 13:  # structure, union
                return f"s{size}"
            case _:
                return f"f{size}"

    def has(self, name):
        return re.search(rf"\b{name}\b", self.text) or re.search(rf"#define {name}\b", self.macros)

    def values(self, expressions):
        there = [e for e in expressions if all(self.has(name) for name in re.findall(r"[A-Za-z_]\w*", e))]
        prints = "".join(f'printf("%lld\\n", (long long)({e}));\n' for e in there)
        printed = self.run(self.prelude() + "int main(void) {\n" + prints + "return 0; }\n")
        return dict(zip(there, map(int, printed)))

    def layouts(self, wanted):
        """Sizes (with None for the field) and offsets of (type, field)."""
        there = [(type, field) for type, field in wanted if self.has(type)]
        prints = "".join(f'printf("%zu\\n", {f"offsetof({t}, {f})" if f else f"sizeof({t})"});\n' for t, f in there)
        printed = self.run(self.prelude() + "int main(void) {\n" + prints + "return 0; }\n")
        return dict(zip(there, map(int, printed)))


# ---- comparisons ----


def table():
    """The exported names of entry-points.tsv, with their decisions and reasons."""
    names = {}
    for line in (HERE / "entry-points.tsv").read_text().splitlines():
        if line and not line.startswith("#"):
            name, flavour, decision, reason = line.split("\t")
            for export in [name] if flavour == "-" else [name, name + flavour]:
                names[export] = decision, reason
    return names


def ranges(names, all_names):
    """The names of releases, as ranges of all."""
    parts, run = [], []
    for name in [*all_names, None]:
        if name in names:
            run.append(name)
        elif run:
            parts.append(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}")
            run = []
    return ", ".join(parts)


def compare(library, releases, with_first):
    order = [release.name for release in releases]
    differences = 0

    def report(title, lines, counts=True):
        nonlocal differences
        differences += len(lines) if counts else 0
        print(f"{title}: {len(lines) or 'none'}")
        for line in sorted(lines):
            print(f"    {line}")

    known = table()
    declared = {}
    for release in releases:
        for name in release.declared:
            declared.setdefault(name, []).append(release.name)
    report("Declared, and not in entry-points.tsv",
           [f"{name} ({ranges(there, order)})" for name, there in declared.items() if name not in known])
    report("With a per-thread flavour that the table lacks or has too much",
           [f"{name}: {sorted(flavours)}" for name in declared
            if not name.endswith(("_ptsz", "_ptds"))
            for flavours in [{f for f in ["_ptsz", "_ptds"] if (name + f in declared) != (name + f in known)}] if flavours])
    unseen = [name for name, (_, reason) in known.items()
              if name not in declared and not reason.startswith("32 bits") and "in no header" not in reason]
    report("In entry-points.tsv, and declared by none of these", [f"{name} ({known[name][0]})" for name in unseen], False)

    # Addresses are pointers here and integers there, which are passed alike.
    def passed(kinds):
        return ["i8" if kind == "p" else kind for kind in kinds]

    lines, first = [], []
    for name, where, kinds in library.functions():
        if name in declared:
            first.append(f"{declared[name][0]}\t{name}\t{where}" + ("" if declared[name][-1] == order[-1]
                                                                     else f" (until {declared[name][-1]})"))
        others = {}
        for release in releases:
            theirs = release.declared.get(name)
            if theirs is not None and passed(theirs) != passed(kinds):
                others.setdefault(tuple(theirs), []).append(release.name)
        lines += [f"{name} in {where}: ({' '.join(kinds)}), but ({' '.join(theirs)}) in {ranges(there, order)}"
                  for theirs, there in others.items()]
    report("Parameters that differ", lines)

    report("Functions whose parameters change between these releases",
           [f"{name} ({known.get(name, ['?'])[0]})" for name in declared
            if len({tuple(r.declared[name]) for r in releases if name in r.declared}) > 1], False)

    lines, nowhere = [], []
    constants = list(library.constants())
    values = {release.name: release.values([expression for _, expression, _ in constants]) for release in releases}
    for where, expression, value in constants:
        there = [name for name in order if expression in values[name]]
        first.append(f"{there[0] if there else 'never'}\t{expression}\t{where}")
        wrong = [f"{values[name][expression]} in {name}" for name in there if values[name][expression] != value]
        lines += [f"{where} is {value}, but {expression} is {', '.join(wrong)}"] if wrong else []
        nowhere += [] if there else [f"{expression} ({where})"]
    report("Constants that differ", lines)
    report("Constants that none of these has", nowhere, False)

    lines = []
    wanted = [(type, field) for uses in STRUCTURES.values() for type, _, fields in uses
              for field in [None, *fields.values()]]
    layouts = {release.name: release.layouts(wanted) for release in releases}
    for (file, name), uses in STRUCTURES.items():
        for type, is_beginning, fields in uses:
            there = [release for release in order if (type, None) in layouts[release]]
            first.append(f"{there[0] if there else 'never'}\t{type}\t{file}: {name}")
            size = library.of_structure(file, name)[0]
            for release in there:
                theirs = layouts[release][type, None]
                if size > theirs or (size != theirs and not is_beginning):
                    lines.append(f"{file}: {name} has {size} bytes, {type} of {release} {theirs}")
                for ours, field in fields.items():
                    at = library.offset(file, name, ours)
                    if layouts[release][type, field] != at:
                        lines.append(f"{file}: {name}.{ours} is at {at}, "
                                     f"{type}.{field} of {release} at {layouts[release][type, field]}")
    report("Structures that differ", lines)

    if with_first:
        print("The first of these releases that has it:")
        print("\n".join(f"    {line}" for line in sorted(set(first), key=lambda l: (order.index(l.split("\t")[0])
              if l.split("\t")[0] in order else len(order), l))))
    return differences


def compare_driver(library, path):
    """The same for a driver's file."""
    listed = subprocess.run(["nm", "-D", "--defined-only", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    exports = set(re.findall(r" [TWi] (cu[A-Z]\w*)", listed))
    driver = ctypes.CDLL(str(path))
    addresses = {ctypes.cast(getattr(driver, name), ctypes.c_void_p).value: name for name in exports}
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    print(f"{path.name}: CUDA {version.value // 1000}.{version.value % 1000 // 10}, {len(exports)} functions")

    known = table()
    unknown = sorted(exports - known.keys())
    shared = sorted(exports - set(addresses.values()))
    print(f"    exported at the address of another: {' '.join(shared) or 'none'}")
    print(f"    exported, and not in entry-points.tsv: {' '.join(unknown) or 'none'}")
    lacking = sorted({name for name, where, _ in library.functions() if where == "driver/mod.rs"} - exports)
    print(f"    called by the library, and lacking: {' '.join(lacking) or 'none'}")

    look_up = driver.cuGetProcAddress_v2 if "cuGetProcAddress_v2" in exports else driver.cuGetProcAddress
    look_up.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p][
        : 5 if "cuGetProcAddress_v2" in exports else 4]
    found, elsewhere = 0, set()
    names = {re.sub(r"(_v\d)?(_pt[sd][zs])?$", "", name) for name in known}
    for name in sorted(names):
        for asked in [*range(2000, 9000, 1000), *(major * 1000 + minor * 10 for major in range(9, 15) for minor in range(10))]:
            for flavour in range(3):
                address, status = ctypes.c_void_p(), ctypes.c_int()
                places = [ctypes.byref(address), asked, flavour, ctypes.byref(status)]
                if look_up(name.encode(), *places[: len(look_up.argtypes) - 1]) == 0 and address.value:
                    found += 1
                    if address.value not in addresses:
                        elsewhere.add(f"{name} of {asked}")
    print(f"    look-ups of {len(names)} names that find something: {found}; that is no export: "
          f"{', '.join(sorted(elsewhere)) or 'none'}")
    return len(unknown) + len(shared) + len(elsewhere)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--since"]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    library = Library()
    releases = [Release(Path(folder)) for folder in arguments if Path(folder).is_dir()]
    releases.sort(key=lambda release: tuple(map(int, release.name.split("."))))
    for release in releases:
        print(f"CUDA {release.name}: {len(release.declared)} functions, from {', '.join(release.headers)}")
    differences = compare(library, releases, "--since" in sys.argv) if releases else 0
    drivers = [Path(file) for file in arguments if not Path(file).is_dir()]
    differences += sum([compare_driver(library, driver) for driver in drivers])
    sys.exit(differences != 0)


if __name__ == "__main__":
    main()
