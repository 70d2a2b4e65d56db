//! The source of a GPU's memory figures.

/// The source of a GPU's memory figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Basis {
    /// Clients' reports, because NVML is not available.
    #[default]
    Reports,
    /// NVML's figures for the whole GPU. NVML lists no processes, or lists PIDs of another PID namespace.
    Total,
    /// NVML's figures for each process.
    Processes,
}

impl Basis {
    /// A sentence about the source, for the log.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Reports => "NVML is not available: programs' reports of memory cannot be verified",
            Self::Total => {
                "NVML shows no memory of single processes: reports are verified against all memory in use on the GPU"
            }
            Self::Processes => "reports are verified against the memory that NVML shows for each process",
        }
    }

    /// The source's name in the status and on D-Bus.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reports => "reports",
            Self::Total => "total",
            Self::Processes => "processes",
        }
    }
}
