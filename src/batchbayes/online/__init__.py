r"""Online learning: data comes in parts, and the posterior after one part is the prior for the next.

$p(w\mid D_1, \dots, D_k) \propto p(D_k\mid w)\,p(w\mid D_1, \dots, D_{k-1})$. Where the posterior is Gaussian and
exact, five parts give what all data at once gives. Three approximations are here:

- `MeanField`: independent Gaussians over all weights;
- `LastLayer`: features are fixed, and the weights of the last layer have a Gaussian with a full covariance;
- `StructuredLaplace`: the same last layer, on features that go on learning near what former parts taught them.

`learn_parts` learns one part after the other, and can be killed and started again.
"""

from batchbayes.online.last_layer import LastLayer as LastLayer
from batchbayes.online.mean_field import MeanField as MeanField, gaussian_kl as gaussian_kl
from batchbayes.online.parts import Part as Part, learn_parts as learn_parts
from batchbayes.online.structured_laplace import StructuredLaplace as StructuredLaplace
