//! The computations of the simulated kernels, element by element. The computations are a separate
//! crate, so that every profile can optimize them. Kernels dominate the time of tests. Optimizing
//! the rest of the simulator takes long and gains little.
//!
//! The functions are `inline(never)`. Otherwise the compiler would inline small functions into
//! crates that are not optimized.

/// The change that a kernel makes to each element.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// Sets the element, without reading it.
    Fill(u32),
    Add(u32),
    /// Mixes the element with its index and a seed. The result depends on the order of the changes,
    /// and every value changes.
    Mix(u32),
    /// Undoes [`Change::Mix`] with the same seed.
    Unmix(u32),
}

/// Changes `n` elements. The index of the first element is `first`.
///
/// # Safety
/// There must be `n` aligned elements without concurrent access.
#[inline(never)]
pub unsafe fn change(elements: *mut u32, n: u64, first: u64, change: Change) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: by the caller's contract, the elements are valid. The processor has AVX2, as
        // checked.
        return unsafe { change_eight_at_once(elements, n, first, change) };
    }
    // SAFETY: the caller's contract.
    unsafe { change_all(elements, n, first, change) };
}

/// [`change_all`], compiled for processors that multiply eight elements in one instruction.
///
/// # Safety
/// As for [`change`], and the processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn change_eight_at_once(elements: *mut u32, n: u64, first: u64, change: Change) {
    // SAFETY: the caller's contract, which includes AVX2.
    unsafe { change_all(elements, n, first, change) };
}

/// # Safety
/// As for [`change`].
#[inline(always)]
unsafe fn change_all(elements: *mut u32, n: u64, first: u64, change: Change) {
    // SAFETY: the caller's contract.
    unsafe {
        match change {
            Change::Fill(value) => (0..n).for_each(|i| elements.add(i as usize).write(value)),
            Change::Add(value) => replace(elements, n, |_, x| x.wrapping_add(value)),
            Change::Mix(seed) => replace(elements, n, |i, x| mix(first + i, x, seed)),
            Change::Unmix(seed) => replace(elements, n, |i, x| unmix(first + i, x, seed)),
        }
    }
}

/// # Safety
/// As for [`change`].
#[inline(always)]
unsafe fn replace(elements: *mut u32, n: u64, f: impl Fn(u64, u32) -> u32) {
    for i in 0..n {
        // SAFETY: the caller's contract.
        unsafe {
            let element = elements.add(i as usize);
            element.write(f(i, element.read()));
        }
    }
}

fn mix(index: u64, x: u32, seed: u32) -> u32 {
    let y = (x ^ seed.wrapping_add(index as u32)).wrapping_mul(0x9e37_79b1);
    y ^ (y >> 15)
}

fn unmix(index: u64, x: u32, seed: u32) -> u32 {
    let y = (x ^ (x >> 15) ^ (x >> 30)).wrapping_mul(0xe8b2f51);
    y ^ seed.wrapping_add(index as u32)
}

/// Returns the sum of `n` elements.
///
/// # Safety
/// There must be `n` aligned elements without concurrent writes.
#[inline(never)]
pub unsafe fn sum(elements: *const u32, n: u64) -> u64 {
    // SAFETY: the caller's contract.
    (0..n).fold(0, |sum, i| sum.wrapping_add(u64::from(unsafe { elements.add(i as usize).read() })))
}

/// The result of `preload/src/memory/fingerprint.ptx` for a part of a chunk.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fingerprint {
    pub sums: [u64; 2],
    /// Zero if all words equal the argument `value` of [`Fingerprint::add`].
    pub differs: u64,
}

impl Fingerprint {
    /// Adds `n` pairs of words. The first pair has the index `first` in its chunk.
    ///
    /// # Safety
    /// There must be `n` pairs of words without concurrent writes. They need no alignment.
    #[inline(never)]
    pub unsafe fn add(&mut self, pairs: *const [u64; 2], n: u64, first: u64, seed: u64, value: u64) {
        for i in 0..n {
            // SAFETY: the caller's contract.
            let [a, b] = unsafe { pairs.add(i as usize).read_unaligned() };
            self.differs |= (a ^ value) | (b ^ value);
            let key = (first + i).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed);
            let (a, b) = (mixed(a ^ key), mixed(b ^ key.wrapping_add(0xd1b5_4a32_d192_ed03)));
            self.sums[0] = self.sums[0].wrapping_add(a).wrapping_add(b);
            self.sums[1] = self.sums[1].wrapping_add(mixed(a.wrapping_add(b.rotate_left(32))));
        }
    }
}

/// The finaliser of MurmurHash3.
fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let x = (x ^ x >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ x >> 33
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmix_undoes_mix_at_every_index() {
        let before: Vec<u32> = (0..1000).map(|i| 7 * i).collect();
        let mut elements = before.clone();
        let n = elements.len() as u64;
        // SAFETY: the vector has `n` elements.
        unsafe { change(elements.as_mut_ptr(), n, u64::from(u32::MAX) - 10, Change::Mix(99)) };
        assert!(elements.iter().zip(&before).all(|(new, old)| new != old), "{elements:?}");
        // SAFETY: the vector has `n` elements.
        unsafe { change(elements.as_mut_ptr(), n, u64::from(u32::MAX) - 10, Change::Unmix(99)) };
        assert_eq!(elements, before);
    }
}
