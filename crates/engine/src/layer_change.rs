//! Another value for an option of a layer, while the device is served.
//!
//! A layer that can goes on with other words by itself, at once. Another layer is put in the place of one that cannot, as a
//! live change like others: requests that are under way end, the stack is swapped, what came meanwhile goes on in the new one.

use crate::change::ChangeError;
use crate::device::{Device, Form};
use crate::host::{Host, HostError};
use crate::spec::{LayerSpec, layer_rows};
use layers::Words;
use std::sync::Arc;

impl Host {
    pub(crate) async fn set_layer(
        &self,
        device: &Arc<Device>,
        layer: &str,
        key: &str,
        value: &str,
    ) -> Result<(), HostError> {
        let form = device.form();
        let (place, words) = find(&form.layers, layer)?;
        let words = words.with(key, value).map_err(|why| ChangeError::Layer(why.to_string()))?;
        let mut layers = form.layers.clone();
        layers[place] = LayerSpec::Driver(words.clone());
        // How many layers stand above it.
        let above = form.layers.len() - 1 - place;
        let same = |tree| Form { stack: form.stack.clone(), layers, tree, table: form.table.clone() };
        if form.tree.change_layer(above, &words.to_string()) {
            device.set_form(Arc::new(same(form.tree.clone())));
            return Ok(());
        }
        let tree = form.tree.with_layer(above, &words)?;
        let form = Arc::new(same(tree));
        let result = self.exchange(device, move || Ok(Ok(form))).await;
        self.let_go(device, result.is_ok());
        result
    }
}

/// The only layer of that name: where it stands among all.
fn find<'a>(all: &'a [LayerSpec], name: &str) -> Result<(usize, &'a Words), ChangeError> {
    let mut found = all.iter().enumerate().filter_map(|(place, layer)| match layer {
        LayerSpec::Driver(words) if words.name() == name => Some((place, words)),
        _ => None,
    });
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => Err(ChangeError::Layer(format!(
            "it has several layers {name} (serve it anew with other options)"
        ))),
        (None, _) if layer_rows().iter().any(|row| row.name == name) => Err(ChangeError::Layer(format!(
            "it has no layer {name} whose options could be changed (show lists its layers)"
        ))),
        (None, _) => {
            Err(ChangeError::Layer(format!("there is no layer {name} (blockyard serve --help lists them)")))
        }
    }
}
