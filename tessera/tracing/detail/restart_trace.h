#pragma once

namespace tessera {

// Thrown in a traced step after one-time setup that the trace must not contain, such as the move of values into their
// flat buffers. The compiler drops the trace and traces the step again. The second trace finds the setup done.
struct RestartTrace {};

}  // namespace tessera
