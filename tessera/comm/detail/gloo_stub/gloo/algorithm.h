#pragma once
// LibTorch ships ProcessGroupGloo.hpp but not the gloo headers it names. This one contributes nothing we touch.
