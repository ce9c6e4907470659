r"""Online learning: data comes in parts, and the posterior after one part is the prior for the next.

$p(w\mid D_1, \dots, D_k) \propto p(D_k\mid w)\,p(w\mid D_1, \dots, D_{k-1})$. Where the posterior is Gaussian and
exact, five parts give what all data at once gives. So it is best to fix many good features with the first part, and to
learn a linear layer on them:

- `random_features` for tables, and `ConjugateRegression`: exact, with unknown noise;
- `patch_features` for images, and `OnlineLastLayer`: a Gaussian with a full covariance over a linear layer.

Three approximations learn all layers of a network:

- `OnlineMeanField`: independent Gaussians over all weights;
- `StructuredLaplace`: a last layer, on features that go on learning near what former parts taught them;
- `ElasticWeights`: the maximum alone, with a spring for each weight (EWC).

`learn_parts` learns one part after the other, and can be killed and started again.
"""

from batchbayes_papers.online.conjugate import ConjugateRegression as ConjugateRegression
from batchbayes_papers.online.elastic import ElasticWeights as ElasticWeights
from batchbayes_papers.online.last_layer import OnlineLastLayer as OnlineLastLayer
from batchbayes_papers.online.mean_field import OnlineMeanField as OnlineMeanField, gaussian_kl as gaussian_kl
from batchbayes_papers.online.parts import DataPart as DataPart, learn_parts as learn_parts
from batchbayes_papers.online.image_features import PatchFeatures as PatchFeatures, patch_features as patch_features
from batchbayes_papers.online.table_features import RandomFeatures as RandomFeatures, random_features as random_features
from batchbayes_papers.online.structured_laplace import StructuredLaplace as StructuredLaplace
