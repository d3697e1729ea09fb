#pragma once

// Models, data sets, the trainer and the launcher, for programs that link Tessera::train. The library itself is in
// tessera/tessera.h.
#include "tessera/data/batch.h"
#include "tessera/data/dataset.h"
#include "tessera/data/sampler.h"
#include "tessera/data/token_file.h"
#include "tessera/launch/launcher.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/sizes.h"
#include "tessera/train/config.h"
#include "tessera/train/plan.h"
#include "tessera/train/trainer.h"
