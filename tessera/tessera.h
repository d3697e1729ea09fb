#pragma once

// Everything, for programs. Code of the library includes what it uses.
#include "tessera/base/error.h"
#include "tessera/base/reduce_op.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/ops.h"
#include "tessera/comm/work.h"
#include "tessera/comm/world.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/shard.h"
#include "tessera/placement/tensor_spec.h"
#include "tessera/redistribute/cost.h"
#include "tessera/redistribute/execute.h"
#include "tessera/redistribute/plan.h"
#include "tessera/rules/rule.h"
#include "tessera/version.h"
