package fleet_test

import (
	"flag"
	"os"
	"testing"
)

// TestMain lets all outages last at the same time: their tests wait for
// seconds, they do not compute.
func TestMain(m *testing.M) {
	flag.Parse()
	flag.Set("test.parallel", "8")
	os.Exit(m.Run())
}

// TestOutages: servers, links and workers that are gone for longer than
// silence may last.
func TestOutages(t *testing.T) {
	noLeak(t)
	t.Run("of", func(t *testing.T) { // returns when all have ended
		for name, f := range map[string]func(*testing.T){
			"a link that is cut":         cutLinkKillsNobody,
			"a worker's link":            unheardWorkerLives,
			"a worker":                   silentWorkerDiesAndReturns,
			"NATS":                       natsRestartKillsNobody,
			"one of two servers":         twoServersAreOneCluster,
			"the server of the only way": clusterHeals,
			"that of an older secret":    clusterSecret,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				f(t)
			})
		}
	})
}
