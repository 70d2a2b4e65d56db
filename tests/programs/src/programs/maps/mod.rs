//! Takes random steps of virtual memory management: memory objects with several handles, mapped at
//! several addresses at the same time, with changing access rights. A model predicts the result of
//! each call and the contents of all memory. The predicted results were observed with driver 580.
//! Calls that crash that driver are made only with `--strict`.

mod queries;

use super::{Outcome, Random, expect};
use crate::{
    args::Args,
    cuda::{Api, Gpu, api, late},
    report::Report,
};
use std::{
    thread,
    time::{Duration, Instant},
};

const GRANULE: u64 = 2 << 20;
const DESCRIPTOR: u32 = 1;
const INVALID_VALUE: u32 = 1;
const NOT_FOUND: u32 = 500;
const NOT_SUPPORTED: u32 = 801;
/// The limit on exportable memory, in bytes. Such memory is pinned until it is freed, so it must
/// leave room for other programs.
const MOST_EXPORTED: u64 = 8 << 20;

/// The model of a memory object.
#[derive(Debug)]
struct Memory {
    /// The object's handles, one for each reference. Two handles may be equal.
    handles: Vec<u64>,
    len: u64,
    types: u32,
    rdma: u8,
    /// Index in [`Model::contents`]. Other objects may share the contents.
    content: usize,
    imported: bool,
    exported: bool,
}

#[derive(Debug)]
struct Mapping {
    at: u64,
    memory: usize,
    rights: u32,
}

struct Model {
    gpu: std::sync::Arc<Gpu>,
    random: Random,
    /// `None` for objects without references.
    memory: Vec<Option<Memory>>,
    contents: Vec<Option<u32>>,
    reservations: Vec<(u64, u64)>,
    mappings: Vec<Mapping>,
    dead: Vec<u64>,
    limit: u64,
    /// If set, memory is neither written nor read, so that no step needs the GPU.
    unused: bool,
    /// If set, calls with unreliable results (on invalid handles) are tested too.
    strict: bool,
    steps: u64,
    checks: u64,
}

/// Calls the driver and returns the error code.
macro_rules! ask {
    ($call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: pointers are to live values of the right type.
        unsafe { (Api::get().$call)($($arg),*) }
    };
}

macro_rules! ask_late {
    ($call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: pointers are to live values of the right type.
        unsafe { late::$call($($arg),*) }
    };
}

const HERE: api::Location = api::Location { kind: 1, id: 0 };

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let time = Duration::from_secs_f64(args.number("seconds", "2"));
    let pause = args.milliseconds("pause-ms", "20");
    // The smallest number of checks, however long they take.
    let checks = args.size("checks", "0");
    let mut model = Model {
        gpu: Gpu::open(0)?,
        random: Random::new(args.size("seed", "1")),
        memory: Vec::new(),
        contents: Vec::new(),
        reservations: Vec::new(),
        mappings: Vec::new(),
        dead: vec![0x1234_5000],
        limit: args.size("mem", "48M"),
        unused: args.given("unused"),
        strict: args.given("strict"),
        steps: 0,
        checks: 0,
    };
    let start = Instant::now();
    while start.elapsed() < time || model.checks < checks {
        model.step().map_err(|e| format!("step {}: {e}", model.steps))?;
        if model.random.below(20) == 0 {
            thread::sleep(pause);
        }
    }
    model.end()?;
    report.integer("steps", model.steps);
    report.integer("checks", model.checks);
    Ok(())
}

impl Model {
    fn step(&mut self) -> Outcome {
        self.steps += 1;
        match self.random.below(24) {
            0..=2 => self.create(),
            3 => self.reserve(),
            4..=7 => self.map(),
            8..=10 => self.set_access(),
            11..=15 | 20 if self.unused => Ok(()),
            11..=13 => self.write(),
            14..=15 => self.check_one(),
            16..=17 => self.unmap(),
            18 => self.release(),
            19 => self.retain(),
            20 => self.export(),
            21..=22 => self.look(),
            _ => self.free_addresses(),
        }
    }

    fn create(&mut self) -> Outcome {
        let granules = if self.random.below(8) == 0 { 33 } else { 1 + self.random.below(10) };
        let types = if granules < 4 && self.random.below(3) == 0 { DESCRIPTOR } else { 0 };
        let (len, rdma) = (granules * GRANULE, self.random.below(2) as u8);
        if self.used() + len > self.limit {
            return Ok(());
        }
        let mut properties = api::Properties { kind: 1, handle_types: types, location: HERE, ..Default::default() };
        properties.flags[1] = rdma;
        let mut handle = 0;
        expect("odd size", ask!(cuMemCreate(&mut handle, 4096, &properties, 0)), INVALID_VALUE)?;
        expect("cuMemCreate", ask!(cuMemCreate(&mut handle, len as usize, &properties, 0)), 0)?;
        self.contents.push(None);
        let content = self.contents.len() - 1;
        self.memory.push(Some(Memory {
            handles: vec![handle],
            len,
            types,
            rdma,
            content,
            imported: false,
            exported: false,
        }));
        Ok(())
    }

    fn reserve(&mut self) -> Outcome {
        if self.reservations.len() >= 4 {
            return Ok(());
        }
        let (mut at, len) = (0, (20 + self.random.below(60)) * GRANULE);
        expect("cuMemAddressReserve", ask!(cuMemAddressReserve(&mut at, len as usize, 0, 0, 0)), 0)?;
        self.reservations.push((at, len));
        Ok(())
    }

    fn map(&mut self) -> Outcome {
        let Some(memory) = self.any_memory() else { return Ok(()) };
        let n = self.reservations.len() as u64;
        let Some((start, size)) = self.reservations.get(self.random.below(n) as usize).copied() else { return Ok(()) };
        let entry = self.memory[memory].as_ref().expect("it exists");
        let (len, handle) = (entry.len, entry.handles.first().copied());
        let mut at = start + self.random.below(size / GRANULE) * GRANULE;
        // Half of the mappings are adjacent to another mapping of this reservation, if any.
        if let Some(last) = self.mappings.last().filter(|m| m.at >= start && m.at < start + size)
            && self.random.below(2) == 0
        {
            at = last.at + self.of(last).len;
        }
        let free = self.is_reserved(at, len) && self.overlapping(at, len).is_empty();
        let Some(handle) = handle else { return Ok(()) };
        // Driver 580 permits some mappings beyond the end.
        if !self.strict && !self.is_reserved(at, len) {
            return Ok(());
        }
        match self.random.below(8) {
            0 => expect("map odd", ask!(cuMemMap(at + 4096, len as usize, 0, handle, 0)), INVALID_VALUE),
            1 if self.strict => {
                let dead = self.dead[self.random.below(self.dead.len() as u64) as usize];
                let lives = self.memory.iter().flatten().any(|m| m.handles.contains(&dead));
                if lives {
                    Ok(())
                } else {
                    expect("map dead", ask!(cuMemMap(at, len as usize, 0, dead, 0)), INVALID_VALUE)
                }
            }
            2 if len > GRANULE && free => {
                let part = (len - GRANULE) as usize;
                expect("map part", ask!(cuMemMap(at, part, 0, handle, 0)), NOT_SUPPORTED)?;
                expect("map behind", ask!(cuMemMap(at, part, GRANULE as usize, handle, 0)), NOT_SUPPORTED)
            }
            _ => {
                let want = if free { 0 } else { INVALID_VALUE };
                expect("cuMemMap", ask!(cuMemMap(at, len as usize, 0, handle, 0)), want)?;
                if free {
                    self.mappings.push(Mapping { at, memory, rights: 0 });
                }
                Ok(())
            }
        }
    }

    /// Returns a range that begins at a mapping. The range is the mapping, the mapping with its
    /// neighbours, a part of the mapping, or more than is mapped.
    fn any_range(&mut self) -> Option<(u64, u64)> {
        let first = self.any_mapping()?;
        let at = self.mappings[first].at;
        let mut len = self.of(&self.mappings[first]).len;
        match self.random.below(6) {
            0 => len += (1 + self.random.below(3)) * GRANULE,
            1 => len = (len - GRANULE).max(GRANULE),
            2 | 3 => {
                while let Some(next) = self.mappings.iter().find(|m| m.at == at + len) {
                    len += self.of(next).len;
                }
            }
            _ => {}
        }
        Some((at, len))
    }

    fn set_access(&mut self) -> Outcome {
        let Some((at, len)) = self.any_range() else { return Ok(()) };
        let rights = [0, 1, 3, 3, 3][self.random.below(5) as usize];
        let access = api::Access { location: HERE, flags: rights };
        let elsewhere = api::Access { location: api::Location { kind: 1, id: 77 }, flags: 3 };
        let odd = api::Access { location: HERE, flags: 2 };
        let whole = self.makes_up(at, len);
        if whole {
            expect("access of no GPU", ask!(cuMemSetAccess(at, len as usize, &elsewhere, 1)), INVALID_VALUE)?;
            expect("odd access", ask!(cuMemSetAccess(at, len as usize, &odd, 1)), INVALID_VALUE)?;
        }
        let want = if whole { 0 } else { INVALID_VALUE };
        expect("cuMemSetAccess", ask!(cuMemSetAccess(at, len as usize, &access, 1)), want)?;
        if whole {
            for i in self.overlapping(at, len) {
                self.mappings[i].rights = rights;
            }
        }
        Ok(())
    }

    fn write(&mut self) -> Outcome {
        let Some(i) = self.any_mapping().filter(|i| self.mappings[*i].rights == 3) else { return Ok(()) };
        let value = self.random.next() as u32;
        let (at, len, content) =
            (self.mappings[i].at, self.of(&self.mappings[i]).len, self.of(&self.mappings[i]).content);
        self.gpu.fill(at, len / 4, value, 0)?;
        // Unmapping does not wait for work, so the program waits.
        self.gpu.synchronise()?;
        self.contents[content] = Some(value);
        Ok(())
    }

    fn check_one(&mut self) -> Outcome {
        match self.any_mapping() {
            Some(i) => self.check(i),
            None => Ok(()),
        }
    }

    fn check(&mut self, i: usize) -> Outcome {
        let (mapping, memory) = (&self.mappings[i], self.of(&self.mappings[i]));
        let Some(value) = self.contents[memory.content].filter(|_| mapping.rights != 0) else { return Ok(()) };
        let (at, count) = (mapping.at, memory.len / 4);
        self.checks += 1;
        expect("sum", self.gpu.sum(at, count)?, count * u64::from(value))
    }

    fn unmap(&mut self) -> Outcome {
        let Some((at, len)) = self.any_range() else { return Ok(()) };
        if !self.is_reserved(at, len) {
            return Ok(());
        }
        let whole = self.cuts_none(at, len);
        let want = if whole { 0 } else { INVALID_VALUE };
        expect("cuMemUnmap", ask!(cuMemUnmap(at, len as usize)), want)?;
        if whole {
            let mut gone = self.overlapping(at, len);
            gone.sort_unstable();
            for i in gone.into_iter().rev() {
                let memory = self.mappings.swap_remove(i).memory;
                self.forget_unused(memory);
            }
            expect("unmap again", ask!(cuMemUnmap(at, len as usize)), 0)?;
        }
        Ok(())
    }

    fn forget_unused(&mut self, memory: usize) {
        let mapped = self.mappings.iter().any(|m| m.memory == memory);
        if !mapped && self.memory[memory].as_ref().is_some_and(|m| m.handles.is_empty()) {
            self.memory[memory] = None;
        }
    }

    fn release(&mut self) -> Outcome {
        let Some(i) = self.any_memory() else { return Ok(()) };
        let Some(entry) = self.memory[i].as_mut() else { return Ok(()) };
        let (Some(handle), imported) = (entry.handles.pop(), entry.imported) else { return Ok(()) };
        expect("cuMemRelease", ask!(cuMemRelease(handle)), 0)?;
        self.forget_unused(i);
        // The driver reuses handles, but never the handle of movable memory that still exists.
        if self.strict && !imported && !self.memory.iter().flatten().any(|m| m.handles.contains(&handle)) {
            self.dead.push(handle);
            expect("release again", ask!(cuMemRelease(handle)), INVALID_VALUE)?;
        }
        Ok(())
    }

    fn retain(&mut self) -> Outcome {
        let Some(i) = self.any_mapping() else { return Ok(()) };
        let (at, memory) = (self.mappings[i].at, self.mappings[i].memory);
        let inside = at + self.random.below(self.of(&self.mappings[i]).len);
        let mut handle = 0;
        expect("cuMemRetainAllocationHandle", ask_late!(cuMemRetainAllocationHandle(&mut handle, inside)), 0)?;
        let entry = self.memory[memory].as_mut().expect("a mapping keeps its memory");
        entry.handles.push(handle);
        Ok(())
    }

    /// Exports memory and imports it again, so that two objects name the same bytes.
    fn export(&mut self) -> Outcome {
        let Some(i) = self.any_memory() else { return Ok(()) };
        let entry = self.memory[i].as_ref().expect("it exists");
        let (len, types, rdma, content, imported) = (entry.len, entry.types, entry.rdma, entry.content, entry.imported);
        let Some(handle) = entry.handles.first().copied().filter(|_| !imported) else { return Ok(()) };
        let mut descriptor = -1;
        let others = self.memory.iter().enumerate().filter(|(other, _)| *other != i).filter_map(|(_, m)| m.as_ref());
        let exported: u64 = others.filter(|m| m.exported).map(|m| m.len).sum();
        if types == 0 {
            let answer = ask_late!(cuMemExportToShareableHandle(&mut descriptor, handle, DESCRIPTOR, 0));
            return expect("export", answer, INVALID_VALUE);
        }
        if exported + len > MOST_EXPORTED {
            return Ok(());
        }
        let answer = ask_late!(cuMemExportToShareableHandle(&mut descriptor, handle, DESCRIPTOR, 0));
        expect("cuMemExportToShareableHandle", answer, 0)?;
        if let Some(entry) = &mut self.memory[i] {
            entry.exported = true;
        }
        let mut other = 0;
        let answer = ask_late!(cuMemImportFromShareableHandle(&mut other, descriptor as usize, DESCRIPTOR));
        // SAFETY: the driver has returned the descriptor to this program, which owns it.
        unsafe { libc::close(descriptor) };
        expect("cuMemImportFromShareableHandle", answer, 0)?;
        self.memory.push(Some(Memory {
            handles: vec![other],
            len,
            types,
            rdma,
            content,
            imported: true,
            exported: false,
        }));
        Ok(())
    }

    /// Queries a mapped and an unmapped address.
    fn look(&mut self) -> Outcome {
        let Some(i) = self.any_mapping() else { return Ok(()) };
        let (mapping, memory) = (&self.mappings[i], self.of(&self.mappings[i]));
        let (at, len, rights) = (mapping.at, memory.len, mapping.rights);
        let (types, rdma, imported) = (memory.types, memory.rdma, memory.imported);
        let handle = memory.handles.first().copied();
        let inside = at + self.random.below(len);
        let (mut base, mut size) = (0, 0);
        let answer = ask_late!(cuMemGetAddressRange_v2(&mut base, &mut size, inside));
        expect("cuMemGetAddressRange", answer, if rights == 0 { NOT_FOUND } else { 0 })?;
        if rights != 0 {
            expect("its base", base, at)?;
            expect("its size", size as u64, len)?;
        }
        let (start, reserved) = self.reservation(at);
        let rest = [(1, 0), (9, 0), (2, 2), (14, if imported { 0 } else { u64::from(types) }), (16, u64::from(rights))];
        for (which, want) in [(11, start), (12, reserved)].into_iter().chain(rest) {
            let mut value = 0;
            expect("cuPointerGetAttribute", ask_late!(cuPointerGetAttribute(&mut value, which, inside)), 0)?;
            expect(&format!("attribute {which}"), value, want)?;
        }
        let mut value = 0;
        let answer = ask_late!(cuPointerGetAttribute(&mut value, 3, inside));
        expect("its address", answer, if rights == 0 { INVALID_VALUE } else { 0 })?;
        expect("its address", value, if rights == 0 { 0 } else { inside })?;
        let mut flags = 0;
        expect("cuMemGetAccess", ask_late!(cuMemGetAccess(&mut flags, &HERE, inside)), 0)?;
        expect("access", flags, u64::from(rights))?;
        let host = api::Location { kind: 2, id: 0 };
        expect("access of the host", ask_late!(cuMemGetAccess(&mut flags, &host, inside)), 0)?;
        expect("access of the host", flags, u64::from(rights))?;
        if let Some(handle) = handle {
            let mut properties = api::Properties::default();
            let answer = ask_late!(cuMemGetAllocationPropertiesFromHandle(&mut properties, handle));
            expect("cuMemGetAllocationPropertiesFromHandle", answer, 0)?;
            expect("its types", properties.handle_types, if imported { properties.handle_types } else { types })?;
            expect("its GPU", properties.location.id, 0)?;
            expect("rdma", properties.flags[1], if imported { properties.flags[1] } else { rdma })?;
        }
        let (start, size) = self.reservations[self.random.below(self.reservations.len() as u64) as usize];
        let hole = start + self.random.below(size / GRANULE) * GRANULE;
        if self.overlapping(hole, 1).is_empty() {
            let (mut base, mut handle) = (0, 0);
            let answer = ask_late!(cuMemGetAddressRange_v2(&mut base, std::ptr::null_mut(), hole));
            expect("range of a hole", answer, NOT_FOUND)?;
            expect("access to a hole", ask_late!(cuMemGetAccess(&mut flags, &HERE, hole)), INVALID_VALUE)?;
            let answer = ask_late!(cuMemRetainAllocationHandle(&mut handle, hole));
            expect("memory of a hole", answer, INVALID_VALUE)?;
            let answer = ask_late!(cuPointerGetAttribute(&mut value, 12, hole));
            expect("size of a hole", answer, INVALID_VALUE)?;
        }
        Ok(())
    }

    fn free_addresses(&mut self) -> Outcome {
        if self.reservations.is_empty() {
            return Ok(());
        }
        let i = self.random.below(self.reservations.len() as u64) as usize;
        let (at, len) = self.reservations[i];
        let empty = self.overlapping(at, len).is_empty();
        let want = if empty { 0 } else { INVALID_VALUE };
        expect("cuMemAddressFree", ask!(cuMemAddressFree(at, len as usize)), want)?;
        if empty {
            self.reservations.swap_remove(i);
        }
        Ok(())
    }

    /// Checks and frees all memory.
    fn end(&mut self) -> Outcome {
        (0..self.mappings.len()).try_for_each(|i| self.check(i))?;
        let mut free = [0, 0];
        expect("cuMemGetInfo", ask!(cuMemGetInfo_v2(&mut free[0], std::ptr::null_mut())), 0)?;
        let taken = self.used();
        for mapping in std::mem::take(&mut self.mappings) {
            let len = self.memory[mapping.memory].as_ref().expect("a mapping keeps its memory").len;
            expect("cuMemUnmap", ask!(cuMemUnmap(mapping.at, len as usize)), 0)?;
        }
        for handle in self.memory.iter().flatten().flat_map(|m| &m.handles) {
            expect("cuMemRelease", ask!(cuMemRelease(*handle)), 0)?;
        }
        for (at, len) in &self.reservations {
            expect("cuMemAddressFree", ask!(cuMemAddressFree(*at, *len as usize)), 0)?;
        }
        expect("cuMemGetInfo", ask!(cuMemGetInfo_v2(&mut free[1], std::ptr::null_mut())), 0)?;
        // Contexts of other programs may start or end at the same time, so the difference is
        // tolerated.
        let gained = (free[1] as u64).saturating_sub(free[0] as u64);
        if gained + (16 << 20) < taken { Err(format!("{taken} bytes freed, {gained} gained").into()) } else { Ok(()) }
    }
}
