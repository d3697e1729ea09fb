#pragma once

// Everything, for programs that link Tessera::train: the library of tessera/tessera.h, models, data sets and loaders,
// the trainer and the launcher.
#include "tessera/data/data_loader.h"
#include "tessera/data/dataset.h"
#include "tessera/data/sampler.h"
#include "tessera/data/token_file.h"
#include "tessera/launch/launcher.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/sizes.h"
#include "tessera/tessera.h"
#include "tessera/train/config.h"
#include "tessera/train/plan.h"
#include "tessera/train/trainer.h"
