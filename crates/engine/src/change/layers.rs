//! Changes an option of a layer of a device that is served.
//!
//! A layer that supports it changes at once. Otherwise another layer replaces it by an online
//! reconfiguration: requests in flight finish, the stack is switched, held requests proceed in the new one.

use crate::change::ChangeError;
use crate::device::{Composition, Device};
use crate::host::{Host, HostError};
use crate::spec::{LayerSpec, layer_rows, scheduler_of, unknown_layer, with_scheduler};
use layers::LayerOptions;
use std::sync::Arc;

/// Returns whether the layers `now` of a served device can be replaced by `next`. Every layer above the first
/// difference must have no files of its own: partitions, overlays and schedulers can only stay.
pub fn can_relayer(now: &[LayerSpec], next: &[LayerSpec]) -> bool {
    let same = common(now, next);
    let is_bare = |layer: &LayerSpec| match layer {
        LayerSpec::Split(_) => true,
        LayerSpec::Driver(options) => options.files().is_empty(),
        LayerSpec::Part(_) | LayerSpec::Cow(_) | LayerSpec::Scheduler(_) => false,
    };
    now[same..].iter().chain(&next[same..]).all(is_bare)
}

/// Counts the layers that two stacks have in common, from the bottom up.
fn common(now: &[LayerSpec], next: &[LayerSpec]) -> usize {
    now.iter().zip(next).take_while(|(now, next)| now == next).count()
}

/// Returns the index and the new options of the only layer in which two stacks differ, if both have the same
/// driver there.
fn only_options_differ(now: &[LayerSpec], next: &[LayerSpec]) -> Option<(usize, LayerOptions)> {
    let mut differing = now.iter().zip(next).enumerate().filter(|(_, (now, next))| now != next);
    let (place, pair) = differing.next()?;
    let is_only = now.len() == next.len() && differing.next().is_none();
    match pair {
        (LayerSpec::Driver(now), LayerSpec::Driver(next)) if is_only && now.name() == next.name() => {
            Some((place, next.clone()))
        }
        _ => None,
    }
}

impl Host {
    pub(crate) async fn set_layer(
        &self,
        device: &Arc<Device>,
        layer: &str,
        key: &str,
        value: &str,
    ) -> Result<(), HostError> {
        let composition = device.composition();
        let (place, options) = find(&composition.layers, layer)?;
        let options = options.with(key, value).map_err(|why| ChangeError::Layer(why.to_string()))?;
        self.set_options(device, place, options).await
    }

    /// Replaces the layers between a device's backend and its scheduler. Unchanged layers at the bottom keep
    /// their state, and so does a layer that accepts other options while it runs.
    pub(crate) async fn set_layers(&self, device: &Arc<Device>, texts: &[String]) -> Result<(), HostError> {
        let wanted: Result<Vec<LayerSpec>, _> = texts.iter().map(|text| text.parse()).collect();
        let mut wanted = wanted.map_err(|why| ChangeError::Layer(why.to_string()))?;
        let composition = device.composition();
        let mut now = with_scheduler(&composition.layers, None);
        // Limits of the whole device stay above everything.
        let limits = now.pop_if(|layer| matches!(layer, LayerSpec::Split(_)));
        if composition.table.is_some() || !can_relayer(&now, &wanted) {
            let why = "its layers cannot be exchanged while it is served (remove it, and add it with others)";
            return Err(ChangeError::Layer(why.to_owned()).into());
        }
        if let Some((place, options)) = only_options_differ(&now, &wanted) {
            return self.set_options(device, place, options).await;
        }
        wanted.extend(limits);
        let wanted = with_scheduler(&wanted, scheduler_of(&composition.layers));
        let same = common(&composition.layers, &wanted);
        let tree = composition.tree.with_top_layers(composition.layers.len() - same, &wanted[same..])?;
        self.check_blocks(device, &tree).map_err(ChangeError::from)?;
        let composition = Composition { stack: composition.stack.clone(), layers: wanted, tree, table: None };
        let result = self.exchange(device, move || Ok(Ok(Arc::new(composition)))).await;
        self.finish_exchange(device, result.is_ok());
        result?;
        self.report_limits(device).await;
        Ok(())
    }

    /// Changes the options of the layer at index `place`: in the running layer, or by replacing it.
    async fn set_options(
        &self,
        device: &Arc<Device>,
        place: usize,
        options: LayerOptions,
    ) -> Result<(), HostError> {
        let composition = device.composition();
        let mut layers = composition.layers.clone();
        layers[place] = LayerSpec::Driver(options.clone());
        // Number of layers above it.
        let above = composition.layers.len() - 1 - place;
        let same = |tree| Composition {
            stack: composition.stack.clone(),
            layers,
            tree,
            table: composition.table.clone(),
        };
        if composition.tree.change_layer(above, &options.to_string()) {
            device.set_composition(Arc::new(same(composition.tree.clone())));
            return Ok(());
        }
        let tree = composition.tree.with_layer(above, &options)?;
        let composition = Arc::new(same(tree));
        let result = self.exchange(device, move || Ok(Ok(composition))).await;
        self.finish_exchange(device, result.is_ok());
        result
    }
}

/// Finds the only layer of that name. Returns its position among all.
fn find<'a>(all: &'a [LayerSpec], name: &str) -> Result<(usize, &'a LayerOptions), ChangeError> {
    let mut found = all.iter().enumerate().filter_map(|(place, layer)| match layer {
        LayerSpec::Driver(options) if options.name() == name => Some((place, options)),
        _ => None,
    });
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => Err(ChangeError::Layer(format!(
            "it has several layers {name} (remove it and add it again with other options)"
        ))),
        (None, _) if layer_rows().iter().any(|row| row.name == name) => Err(ChangeError::Layer(format!(
            "it has no layer {name} whose options could be changed (show lists its layers)"
        ))),
        (None, _) => Err(ChangeError::Layer(unknown_layer(name).to_string())),
    }
}
