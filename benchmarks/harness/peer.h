#pragma once
#include "benchmarks/harness/bench.h"

#include <iosfwd>
#include <string>

namespace tessera::cli {

// Runs benchmarks/peers/NAME.py, which prints a line {"case": .., "value": .., "plain": ..} per case ("plain" is
// optional). Peers are for comparison only: without a Python that has torch, or without a script for this bench, says
// so in one line on `log` and gives nothing.
PeerFigures run_peer(const std::string& bench, std::ostream& log);

// Reads such lines. Throws UsageError for a line that is none.
PeerFigures parse_peer_lines(const std::string& text);

}  // namespace tessera::cli
