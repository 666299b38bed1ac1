package gpus

import (
	"fmt"
	"os"
	"path/filepath"
)

// libraryName is the CUDA library's, which is looked for beside the program and by the loader.
const libraryName = "libxpyd_cuda.so"

// Lacks says, for whoever wants a GPU and gets none, what there is of driver, devices and library,
// and what to do. library is the path that the environment names; "": none.
func Lacks(list List, library string) string {
	driver := "no GPU"
	switch cards, err := list(); {
	case err != nil:
		driver = err.Error()
	case len(cards) > 0:
		driver = fmt.Sprintf("the driver has %d (%s)", len(cards), cards[0].Name)
	}
	where := "only by the loader's path"
	if library != "" {
		where = library + there(library)
	} else if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), libraryName)
		where = beside + there(beside) + ", else on the loader's path"
	}
	return fmt.Sprintf("GPUs: %s; %s: %s. Needed are NVIDIA's driver, a build with CGO_ENABLED=1, and what scripts/build-cuda makes beside the program (docs/models-and-gpus.md); --device cpu needs none", driver, libraryName, where)
}

func there(path string) string {
	if _, err := os.Stat(path); err != nil {
		return " (not there)"
	}
	return " (there)"
}
