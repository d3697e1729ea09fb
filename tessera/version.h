#pragma once

// The version of Tessera. CMakeLists.txt reads these three lines, so this is the only place that knows it.
#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

// The same as text: "0.1.0".
#define TESSERA_STRINGIFY_(x) #x
#define TESSERA_STRINGIFY(x) TESSERA_STRINGIFY_(x)
#define TESSERA_VERSION                    \
  TESSERA_STRINGIFY(TESSERA_VERSION_MAJOR) \
  "." TESSERA_STRINGIFY(TESSERA_VERSION_MINOR) "." TESSERA_STRINGIFY(TESSERA_VERSION_PATCH)
