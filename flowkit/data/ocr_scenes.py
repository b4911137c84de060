"""What the OCR prompts are made of: scenes, and the texts that fit them. Only words, no logic."""

from __future__ import annotations

from itertools import product

SCENES: dict[str, tuple[str, ...]] = {
    "shop": (
        "a narrow shop front with the hand-painted name {text} above its door",
        "a wooden sign that reads {text} swinging over a cobbled lane",
        "a brass plate engraved {text} beside a green front door",
        "a shop window with the name {text} in gilded letters on the glass",
        "a red neon sign saying {text} over the entrance of a late-night cafe",
        "a delivery van parked at the kerb with {text} painted along its side",
        "a striped awning printed with {text} over a market stall",
        "a paper carrier bag stamped {text} on a kitchen counter",
        "a business card lettered {text} lying on a leather desk pad",
        "a barn wall with faded letters that spell {text}",
        "a waiter's apron with {text} embroidered across the chest",
        "a matchbox labelled {text} on a bar top",
    ),
    "notice": (
        "a yellow warning sign that says {text} fixed to a wire fence",
        "a laminated notice reading {text} taped to a lift door",
        "a small enamel sign with the words {text} screwed to a garden gate",
        "a sandwich board on the pavement that reads {text}",
        "a traffic sign with the words {text} at the edge of a wet road",
        "a cardboard sign with {text} in thick black marker on a parcel shelf",
        "a metal sign lettered {text} next to a factory gate",
        "a blinking roadside panel that shows {text} in orange dots",
        "a note with the words {text} under a magnet on a fridge",
        "a platform sign that reads {text} in an underground station",
        "a wooden post with a board saying {text} at the start of a forest path",
    ),
    "slogan": (
        "a white mug with {text} printed on it beside a laptop",
        "a T-shirt with the words {text} across the front on a washing line",
        "a letterpress poster that says {text} in a narrow hallway",
        "a neon light bent into the words {text} on a brick wall",
        "a chalkboard with {text} written in careful capitals behind a teacher's desk",
        "a birthday cake with {text} piped on it in blue icing",
        "a canvas tote bag that reads {text} hanging from a bicycle",
        "a sticker saying {text} on the lid of a guitar case",
        "a bracelet of letter beads that spell {text} on a windowsill",
        "a doormat woven with the words {text} on stone steps",
        "sky writing that spells {text} above a beach",
        "a wall in a skate park sprayed with {text} in round letters",
        "a cushion stitched with {text} on a grey sofa",
        "a badge with the words {text} pinned to a denim jacket",
    ),
    "book": (
        "a worn paperback titled {text} on a park bench",
        "a leather-bound book with {text} stamped in gold on the cover",
        "a stack of novels, the top one called {text}",
        "a cinema marquee announcing {text} on a rainy evening",
        "a film poster for {text} behind scratched glass",
        "a record sleeve with the title {text} leaning on a turntable",
        "a theatre programme printed with {text} on a velvet seat",
        "a board game box with {text} on the lid on a rug",
        "the first page of a manuscript headed {text} in an old typewriter",
        "a comic book with {text} in bursting letters on its cover",
        "a bookshop window with a large card that recommends {text}",
    ),
    "menu": (
        "a chalkboard outside a bistro with {text} as the dish of the day",
        "a menu card that offers {text} on a checked tablecloth",
        "a jar with a handwritten label that says {text} on a pantry shelf",
        "a market stall with a price card reading {text}",
        "a food truck with {text} painted beside its hatch",
        "a tin with a vintage label that reads {text}",
        "a glass bottle labelled {text} on a farmhouse table",
        "a wooden crate stencilled with {text} in a cellar",
        "a receipt with the line {text} lying next to a coffee cup",
        "a bakery window with a paper banner that says {text}",
        "a recipe card headed {text} held up by a wooden clip",
    ),
    "event": (
        "a poster for {text} glued to an advertising column",
        "a banner with the words {text} hung across a village street",
        "a concert ticket printed with {text} in an open hand",
        "a calendar page with {text} circled in red",
        "a stage with a backdrop that reads {text}",
        "a train departure board with {text} in its top line",
        "a wristband marked {text} on a wooden table",
        "a school notice board with a flyer for {text}",
        "a kite with {text} on its wings over a green hill",
        "a hot air balloon with {text} around its middle",
        "a shop window with a banner saying {text}",
    ),
    "plate": (
        "a license plate that reads {text} on a mint-green old car",
        "a shipping container stencilled {text} in a harbour",
        "a race car with {text} on its door in a pit lane",
        "a key tag engraved {text} on a hotel desk",
        "a locker with the label {text} in a swimming hall",
        "a small boat with {text} painted on its bow",
        "a football shirt with {text} on its back",
        "a seat marker that says {text} in an empty theatre",
        "a mailbox with {text} in white letters on a country road",
        "a lab bottle with a printed label {text} in a rack",
        "a freight wagon with {text} in white paint on rusty steel",
    ),
}

LIGHTS: tuple[str, ...] = (
    "soft morning light",
    "late afternoon sun",
    "rain on the ground",
    "under a street lamp",
    "in thick fog",
    "snow falling",
    "bright noon light",
    "lit by a single candle",
    "warm lamp light",
    "blue hour",
    "seen from slightly below",
    "seen from across the street",
    "close up",
    "shallow depth of field",
    "people blurred in the background",
    "a cat asleep in the corner",
    "autumn leaves all around",
    "a bicycle leaning nearby",
    "steam in the air",
    "reflected in a puddle",
)

STYLES: tuple[str, ...] = (
    "35 mm photograph",
    "watercolour",
    "pencil drawing",
    "oil painting",
    "flat vector illustration",
    "film still",
    "woodcut print",
    "studio photograph",
    "gouache illustration",
    "black and white photograph",
)


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split("|")


_CRAFT = _words(
    "Amber Anchor Basalt Bramble Cinder Clover Copper Cricket Dapple Ember Fennel Ferry Gable Garnet "
    "Harbour Hazel Ivory Juniper Kestrel Lantern Linden Maple Marble Meadow Nettle Orchard Otter Pebble "
    "Quill Raven Saffron Sparrow Thistle Tinder Velvet Walnut Willow Wren"
)
_TRADE = _words(
    "Bakery Books Cycles Tailors Florist Records Barber Coffee Pottery Hardware Tea Cheese Toys Clocks "
    "Hotel Press"
)
_FORBIDDEN = _words(
    "Parking Swimming Fishing Smoking Diving Cycling Running Shouting Camping Feeding Skating Climbing "
    "Entry Exit Photographs Dogs Bicycles Ladders Fires Drones"
)
_DANGER = _phrases(
    "Wet Paint|Low Bridge|Deep Water|Hot Surface|Thin Ice|Falling Rocks|Loose Gravel|High Voltage|"
    "Sharp Bend|Soft Verge|Slippery Floor|Steep Steps|Strong Current|Moving Belt|Narrow Road|Live Rails"
)
_REQUEST = _phrases(
    "Please Ring Twice|Mind the Gap|Keep Right|Wipe Your Feet|Close the Gate|Use Other Door|Wait Here|"
    "Pay at Desk|Queue Starts Here|Back in Ten Minutes|Sold Out|Open Until Nine|Closed on Monday|"
    "Do Not Lean Here|Lift Not Working|Fragile Handle With Care|This Side Up|Staff Only|Free to Take|"
    "Lost Umbrella|Room to Let|Slow Children Playing|Turn Engine Off|Keep Door Shut|Ask for Help|"
    "Push to Open|Shoes Off Please|Quiet Please|Private Road|Last Exit"
)
_WAY = _phrases("Next Stop|Welcome to|Ferry to|Last Bus to|Turn Left for|Footpath to")
_PLACE = _phrases(
    "Willow Park|Old Quay|Mill Lane|Chalk Cliff|Upper Weir|Castle Green|Sand Point|Long Barn|Heron Lake|"
    "Market Cross|Windy Gap|Station Road|Fox Hollow|Stone Bridge|East Beach|Pine Ridge"
)
_DO = _words(
    "Bake Borrow Build Carry Chase Draw Find Follow Grow Keep Learn Make Mend Paint Plant Read Remember "
    "Share Sing Taste Trust Write"
)
_WHAT = _phrases(
    "More Bread|the Moon|Small Things|Your Own Map|Good Questions|the Long Way|Quiet Hours|Wild Ideas|"
    "Old Songs|Less Noise|One More Page|What You Love|Better Mistakes|Slow Mornings|Something Blue|"
    "Brave Words|the Open Sky|Sunday Soup|Every Colour|a Little Luck"
)
_HERO = _words(
    "Clockmaker Lighthouse Cartographer Glassblower Ferryman Astronomer Beekeeper Gardener Locksmith "
    "Nightwatch Orchardist Papermaker Pilot Ropewalker Shepherd Stonemason Telegraph Weathervane Puppeteer "
    "Swimmer"
)
_OF = _phrases(
    "Winter|Salt Hill|the North Road|Nine Rivers|Ash Lane|the Last Tram|Tin Island|Hollow Bay|"
    "the Red Desert|Glass Town|Second Street|Silent Water|the Tall Grass|Pepper Cove|Room Seven|"
    "the Green Door"
)
_TASTE = _words(
    "Smoked Roasted Pickled Spiced Salted Sweet Fresh Stuffed Candied Warm Wild Grilled Marinated Crispy"
)
_FOOD = _words(
    "Almonds Apricots Aubergine Barley Beetroot Cherries Chestnuts Cod Figs Garlic Leeks Lentils Mackerel "
    "Mushrooms Mustard Olives Onions Peaches Pears Peppers Plums Pumpkin Radishes Trout Turnips Walnuts "
    "Quinces Potatoes"
)
_HAPPENING = _phrases(
    "Kite Festival|Book Swap|Winter Market|Jazz Night|Tractor Race|Choir Day|Lantern Walk|Chess Open|"
    "Seed Fair|Puppet Show|Boat Parade|Ghost Tour|Cider Weekend|Repair Cafe|Stargazing Club|Dance Marathon|"
    "Poetry Slam|Apple Day"
)
_WHEN = _phrases(
    "Friday at 8|May 14|June 21|Sunday Noon|Hall B|Gate 7|July 9|This Saturday|Row 12|March 3|Doors 19:30|"
    "Pier 4|Until Midnight|Week 33|Tent 2|August 1"
)
_LETTERS = "ABDEGHKLMNPRTXZ"


def targets() -> dict[str, list[str]]:
    """The texts that may be asked for, by the kind of scene they fit; no text stands under two kinds."""
    prohibitions = [f"No {what}" for what in _FORBIDDEN]
    warnings = [f"Caution {what}" for what in _DANGER]
    ways = [f"{way} {place}" for way, place in product(_WAY, _PLACE)]
    pairs = product(enumerate(_LETTERS), repeat=2)
    return {
        "shop": [f"{craft} {trade}" for craft, trade in product(_CRAFT, _TRADE)],
        "notice": prohibitions + warnings + _REQUEST + ways,
        "slogan": [f"{do} {what}" for do, what in product(_DO, _WHAT)],
        "book": [f"The {hero} of {place}" for hero, place in product(_HERO, _OF)],
        "menu": [f"{taste} {food}" for taste, food in product(_TASTE, _FOOD)],
        "event": [f"{what} {when}" for what, when in product(_HAPPENING, _WHEN)],
        # Three digits for a pair of letters, spread so that neighbours look nothing alike.
        "plate": [f"{a}{b} {100 + (i * 379 + j * 113) % 900}" for (i, a), (j, b) in pairs],
    }
