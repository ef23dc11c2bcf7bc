//! The export of a device that names none: the first of [`default_exports`] that is possible.

use crate::{Exports, loop_device, ublk};
use engine::device::Device;
use engine::topology::{ExportKind, NbdOptions};
use spec::{ExportOptions, LoopSpec, NbdAddress, NbdExportSpec, TlsSpec, UblkSpec, default_exports};
use std::sync::Arc;

const UBLK: &str = UblkSpec::ROW.kind;
const LOOP: &str = LoopSpec::ROW.kind;
const NBD: &str = NbdExportSpec::ROW.kind;

impl Exports {
    /// Chooses the export of a device whose description names none. Returns it with the reason for the
    /// choice. `options` apply if the choice is NBD. `wanted` is the kind that the user prefers; it is used
    /// without a check.
    pub async fn choose(
        &self,
        device: &Arc<Device>,
        options: &NbdOptions,
        wanted: Option<&str>,
    ) -> (ExportKind, String) {
        let chosen = |kind| self.with_defaults(kind, device, options);
        if options.name != device.name().as_str() || options.tls != TlsSpec::default() {
            return (chosen(NBD), "options for NBD were given".to_owned());
        }
        let rows = default_exports();
        if let Some(row) = rows.iter().find(|row| Some(row.kind) == wanted) {
            return (chosen(row.kind), "BLOCKYARD_EXPORT says so".to_owned());
        }
        let mut refused = Vec::new();
        for row in rows {
            match self.check(row.kind, device).await {
                Ok(()) if refused.is_empty() => return (chosen(row.kind), "this kernel has it".to_owned()),
                Ok(()) => return (chosen(row.kind), refused.join("; ")),
                Err(why) => refused.push(format!("{} is not possible: {why}", row.kind)),
            }
        }
        (chosen(NBD), refused.join("; "))
    }

    /// Checks whether a device can have an export of this kind with default options.
    ///
    /// # Errors
    /// Returns the reason why the device cannot have it.
    async fn check(&self, kind: &str, device: &Arc<Device>) -> Result<(), String> {
        match kind {
            UBLK => ublk::is_possible(self.host(), device).await.map_err(|why| why.to_string()),
            LOOP => loop_device::is_possible(),
            NBD => Ok(()),
            _ => unreachable!("{kind} has a rank and no check"),
        }
    }

    /// Returns an export with default options. The socket of NBD is in the run directory.
    fn with_defaults(&self, kind: &str, device: &Arc<Device>, options: &NbdOptions) -> ExportKind {
        if kind == NBD {
            let address = NbdAddress::Unix(self.run().nbd_socket(device.name().as_str()));
            return ExportKind::Nbd(NbdExportSpec { address, options: options.clone() });
        }
        ExportKind::parse(kind, "", options).expect("its value may be omitted")
    }
}

/// Chooses the kind of export that is a block device of this kernel: the one that is `wanted`, or the first
/// of [`default_exports`] that is possible here. `None`: neither is.
pub fn block_export(wanted: Option<&str>) -> Option<&'static str> {
    let is_possible = |kind: &str| match kind {
        UBLK => ublk::is_offered().is_ok(),
        LOOP => loop_device::is_possible().is_ok(),
        _ => false,
    };
    let kinds = || default_exports().into_iter().map(|row| row.kind).filter(|kind| *kind != NBD);
    kinds().find(|kind| Some(*kind) == wanted).or_else(|| kinds().find(|kind| is_possible(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_device_that_is_wanted_is_chosen() {
        assert_eq!(block_export(Some(LOOP)), Some(LOOP));
        assert_eq!(block_export(Some(UBLK)), Some(UBLK));
        assert_eq!(block_export(Some(NBD)), block_export(None));
    }

    #[test]
    fn every_default_export_has_a_check_and_needs_no_value() {
        for row in default_exports() {
            assert!([UBLK, LOOP, NBD].contains(&row.kind), "{row:?}");
            assert!(row.value_optional || row.kind == NBD, "{row:?}");
        }
    }
}
