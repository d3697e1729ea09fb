#pragma once

namespace tessera {

// Thrown in a step that is being traced by who has just put something in order that belongs before it, outside of the
// trace (values into the memory they are kept in, say): the trace starts again, and finds it so.
struct RestartTrace {};

}  // namespace tessera
