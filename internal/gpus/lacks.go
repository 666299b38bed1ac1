package gpus

import (
	"fmt"
	"os"
	"path/filepath"
)

// libraryName is the CUDA library's, which is looked for beside the program and by the loader.
const libraryName = "libxpyd_cuda.so"

// Lacks says, for whoever wants a GPU and gets none, what was looked for, what there is of it, and what
// to do. library is the path that the environment names; "": none.
func Lacks(list List, library string) string {
	driver := "it has no GPU"
	switch cards, err := list(); {
	case err != nil:
		driver = err.Error()
	case len(cards) > 0:
		driver = fmt.Sprintf("it has %d, such as %s", len(cards), cards[0].Name)
	}
	where := "the loader's path"
	if library != "" {
		where = there(library)
	} else if self, err := os.Executable(); err == nil {
		where = there(filepath.Join(filepath.Dir(self), libraryName)) + ", else " + where
	}
	return fmt.Sprintf("Looked for GPUs of NVIDIA's driver (%s) and for %s (%s). GPUs need both, and a build with CGO_ENABLED=1; scripts/build-cuda makes the latter, which goes beside xpyd (docs/models-and-gpus.md)", driver, libraryName, where)
}

func there(path string) string {
	if _, err := os.Stat(path); err != nil {
		return path + ": not there"
	}
	return path + ": there"
}
